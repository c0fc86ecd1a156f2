"""The documentation site: what MkDocs does not do by itself. Not part of the package."""
