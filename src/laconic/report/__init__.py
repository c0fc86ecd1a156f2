"""From the events of a run to results, a trace and one offline HTML file."""
