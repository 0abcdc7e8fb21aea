"""The ops on a CPU, as fast as torch goes there: weights in the layout of its products, and C++ where it pays."""
