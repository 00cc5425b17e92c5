"""The shell: sockets, waiting requests and timers around the cores and the logs."""
