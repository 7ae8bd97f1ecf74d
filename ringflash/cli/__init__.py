"""What people start by hand: python -m ringflash."""
