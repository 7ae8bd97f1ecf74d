"""WHAT must be computed: positions, masks, bounds and plans. CPU integers only; no GPU, no process group."""
