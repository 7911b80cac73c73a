"""The whole gpu lane on the card at hand: ceilings, errors and speed of every kernel, and which tiles it wants."""
