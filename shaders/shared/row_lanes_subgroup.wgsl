// The same, with sums by shuffles.
#import lanes_subgroup
#import rows_part
