"""Faster kernels for training, plugged into the network by `import metaphrase`."""
