"""Which slow tests a change can touch: nothing else of the suite is ever left out.

``checkout`` tells what differs from a commit, ``graph`` what each file depends on, ``rules`` what a
change touches, ``full_run`` which commit all tests have passed on, ``plugin`` is pytest's side.
"""
