"""What a served drafter is worth: acceptance and speed."""
