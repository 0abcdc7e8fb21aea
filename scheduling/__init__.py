"""What the scheduler and its door decide beside the mixed step: policies, beams, samples, swap, the classic order."""
