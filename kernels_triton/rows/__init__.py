"""Operations on rows: norms, gates and rotations."""
