"""Performance as ratios within one run. Run alone: other torch processes spoil every number."""
