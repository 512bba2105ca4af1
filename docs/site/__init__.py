"""Builds the site from the pages: ``python -m docs.site FOLDER``, in the environment of docs/requirements.txt."""
