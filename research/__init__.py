"""Our own research: how the embedded backbone and the demo tasks were made, and what was measured."""
