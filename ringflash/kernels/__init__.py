"""HOW one piece is computed: one device, no process group."""
