"""Small kernels of a server's step: new keys and values into a cache, partial attention results into one."""
