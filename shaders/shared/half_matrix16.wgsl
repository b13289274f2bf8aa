// Tiles by matrices of 16 x 16.
#import half_matrix
#import staged16
