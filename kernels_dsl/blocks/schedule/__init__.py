"""Work for each CTA: rasters, groups, queues, lists of blocks."""
