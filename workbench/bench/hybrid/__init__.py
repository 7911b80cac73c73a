"""The gpu lane on a card: right answers, and passes measured beside their bound and their simulation."""
