"""The script that Streamlit runs; everything is in :mod:`memest.app.main`."""

from memest.app.main import run

run()
