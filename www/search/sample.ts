// A text to try the search with.
export const SAMPLE = `A sourdough starter is flour and water in which wild yeast and bacteria live. Feed it every day, and it will raise a loaf without any yeast from a packet.

Bread that was baked yesterday comes back to life when it is sprinkled with water and put into a hot oven for five minutes.

The tide rises and falls twice a day because the moon pulls at the sea. When sun and moon pull along one line, the water comes up higher than usual.

An octopus has three hearts and blue blood. Two of the hearts pump blood through the gills, the third one through the rest of its body.

Bees tell each other where flowers are by dancing. The angle of the dance gives the direction from the sun, and its length gives the distance.

To mend a flat tyre, take the wheel off, pull the inner tube out and hold it under water: bubbles show where the hole is.

A bicycle chain lasts longer if it is wiped clean and oiled after every ride in the rain.

The first printed books in Europe were made around 1450. Before that, a scribe needed months to copy a single volume by hand.

Paper was invented in China about two thousand years ago, and was made of bark, hemp and old rags.

A violin's sound comes mostly from its body: the strings set the bridge moving, the bridge moves the top plate, and the plate moves the air.

When you cannot sleep, get up again. Lying awake teaches the body that the bed is a place for worrying.

Strong coffee late in the day shortens deep sleep even in those who fall asleep easily.

A budget that works begins with what must be paid each month, puts something aside next, and leaves the rest to be spent.

Interest that is not paid out earns interest itself. Over thirty years, a small difference in the rate doubles what is there at the end.

Volcanoes that erupt gently have thin lava, from which gas escapes. Thick lava holds the gas back until the mountain explodes.

Snow that creaks under your shoes is colder than ten degrees below zero: the crystals are too hard to melt under your weight, and break.`;
