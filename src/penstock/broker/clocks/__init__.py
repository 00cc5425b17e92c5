"""The current time by the clocks of all nodes, and whether it is safe to delete by age. Imports ``storage``."""
