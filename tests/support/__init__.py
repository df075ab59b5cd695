"""What several tests share: real runs to compare with, small models, made-up data."""
