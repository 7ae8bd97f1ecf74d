"""The names and signatures of other libraries, for scripts that move to ringflash by one line."""
