"""The vocabulary every room shares: what is sent, over what, when, and what is remembered. No algorithm lives here."""
