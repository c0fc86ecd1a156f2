"""Random faults at random moments of real training, and whether everybody else ends as promised."""
