"""Where bytes live and how they move: devices, staging memory, tiers, swap space, and the I/O underneath."""
