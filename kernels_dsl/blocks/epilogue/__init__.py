"""From accumulators to global memory: scaling, activations, conversion, stores."""
