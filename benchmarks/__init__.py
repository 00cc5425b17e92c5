"""How fast it is: ratios measured in one run, or CPU time per unit. Never a bare time."""
