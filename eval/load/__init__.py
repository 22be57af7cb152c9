"""What is sent to servers, and a record of each request."""
