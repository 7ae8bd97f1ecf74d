"""Kernels for Hopper GPUs, written in Gluon."""
