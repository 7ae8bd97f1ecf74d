"""The parts of `examples/train_long_context.py`, one subject per file.

Read in this order: text (files to packed sequences), model (the transformer), training (the step, where the sequence is
cut), then what surrounds a real run: processes, checkpoint, compare, sample, progress, plot, settings.
"""
