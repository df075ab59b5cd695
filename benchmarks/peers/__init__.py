"""memest beside other ways to the same number: the same runs, errors and time in one go."""
