"""HOW pieces meet: process groups, streams, gradients."""
