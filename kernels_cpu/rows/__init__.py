"""Operations on rows: norms, rotations and gates."""
