"""Making tasks: training, evaluating and importing bundles."""
