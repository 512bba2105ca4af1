"""The pages of Clearhead and the code that draws their pictures."""
