"""What tests are made of: the dense oracle, tolerances, worker processes, ahead-of-time compilation."""
