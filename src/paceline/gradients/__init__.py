"""From "gradient ready" to averaged gradients: plan, buckets, hooks, reducer."""
