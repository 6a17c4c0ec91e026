"""What a step costs against its size."""
