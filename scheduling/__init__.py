"""What the scheduler and its door decide beside the mixed step: policies, samples, swap, the classic order."""
