"""The page of jobs (`holdfast ui`) and the report as one file. Removable; needs the extra `ui`."""
