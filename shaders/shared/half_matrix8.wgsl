// Tiles by matrices of 8 x 8.
#import half_matrix
#import staged8
