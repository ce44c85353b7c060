"""What a machine has: read from /sys and /proc below a root that a test may set."""
