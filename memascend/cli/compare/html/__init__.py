"""The report of a comparison as one HTML file: charts, tables, and the page around them."""
