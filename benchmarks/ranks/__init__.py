"""What each of several processes holds of a model that is split over them."""
