"""Training engines that the step benchmark compares, each in a process of its own."""
