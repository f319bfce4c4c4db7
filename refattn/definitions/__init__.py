"""Every mechanism a second time, as named steps over whole matrices in float64 NumPy."""
