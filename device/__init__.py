"""A worker's start: weights, memory plan, warm-up and graphs; and what keeps it up while it runs."""
