"""Live runs against their simulation: how well settings are predicted, and what overlap gains."""
