//! Resizing, equal to Pillow bit by bit.

use tilewright::picture::{Filter, Picture};

use super::{Pixels, message_of};

const FILTERS: [(&str, Filter); 3] =
    [("bilinear", Filter::Bilinear), ("bicubic", Filter::Bicubic), ("lanczos", Filter::Lanczos)];

/// Narrower and wider, lower and higher, one axis alone.
#[test]
fn equals_pillow() {
    let pixels = Pixels::open();
    let source = pixels.get("a.png.rgb");
    for (name, filter) in FILTERS {
        for (width, height) in [(17, 47), (32, 32), (61, 20), (96, 64)] {
            let want = pixels.get(&format!("resize.{name}.{width}x{height}"));
            assert!(source.resize(width, height, filter).unwrap() == want, "{name}, {width} x {height}");
        }
        assert!(source.resize(source.width(), source.height(), filter).unwrap() == source, "{name}, same size");
    }
    let tall = pixels.get("odd/tall.png.rgb");
    assert_eq!(tall.resize(30, 40, Filter::Lanczos).unwrap(), pixels.get("odd/tall.png.lanczos.30x40"));
}

/// Weights add up to one whatever the sizes, so a picture of one colour keeps it.
#[test]
fn keeps_one_colour() {
    for (_, filter) in FILTERS {
        for (width, height) in [(1, 1), (1, 4000), (3, 5), (256, 3)] {
            let colour = [0, 128, 255];
            let picture = Picture::new(width, height, colour.repeat((width * height) as usize)).unwrap();
            for (to_width, to_height) in [(1, 1), (7, 2), (64, 64), (1000, 1)] {
                let resized = picture.resize(to_width, to_height, filter).unwrap();
                assert_eq!((resized.width(), resized.height()), (to_width, to_height));
                assert!(resized.rgb().chunks(3).all(|pixel| pixel == colour), "{filter:?} {width} {to_width}");
            }
        }
    }
}

#[test]
fn refuses_sizes() {
    let picture = Picture::new(1, 65_535, vec![7; 3 * 65_535]).unwrap();
    let refused = |width, height| message_of(picture.resize(width, height, Filter::Bicubic));
    let message = "resize: `size` is 0 x 9, expected a window inside the size, and neither empty";
    assert_eq!(refused(0, 9), message);
    assert!(refused(1 << 31, 1 << 31).contains("sides of at most 65536"));
    assert!(refused(1 << 16, 1 << 16).contains("at most 67108864 pixels"));
    // Few pixels, but not between the two passes.
    assert!(refused(65_535, 1).contains("at most 67108864 pixels"));
    let long = Picture::new(65_537, 1, vec![7; 3 * 65_537]).unwrap();
    let message = message_of(long.resize(9, 1, Filter::Lanczos));
    assert!(message.contains("`size` is 65537 x 1, expected a picture with sides of at most 65536"), "{message}");
}
