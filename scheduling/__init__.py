"""What the scheduler decides beside the mixed step: beams, fairness, grammars."""
