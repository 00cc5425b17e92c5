"""What time it is, by the clocks of all nodes, and whether to delete by it. Imports ``storage``."""
