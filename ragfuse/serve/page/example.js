// A document to begin with, written for this page: a place that no model knows.

export const EXAMPLE = `The lighthouse of Skarholm

The lighthouse of Skarholm stands on a rock eleven kilometres off the northern coast. It was built between 1871 and 1874 by the engineer Ida Lindqvist, who had already built two bridges on the mainland. The tower is forty-two metres high and made of grey granite that was brought by ship from a quarry at Vessby.

The lamp was first lit on the evening of 3 November 1874. For its first thirty years it burned colza oil, which the keepers carried up one hundred and ninety-six steps in copper cans. In 1904 it was changed to paraffin, and in 1952 an electric lamp of one thousand watts took its place.

Three keepers lived on the rock at a time, each for six weeks. The best known of them was Anders Holm, who served from 1889 to 1926 and wrote down the weather four times a day. His books fill seventeen volumes and are kept in the museum at Vessby, where meteorologists still use them.

In the winter of 1893 the sea froze as far as the rock. Holm and the second keeper, Maria Brandt, walked eleven kilometres across the ice to fetch a doctor for the third keeper, who had broken his leg on the stairs. The walk took them nine hours, and all three returned to the rock in the spring.

The fog signal of Skarholm is a horn driven by compressed air. It sounds twice every ninety seconds and can be heard at a distance of fourteen kilometres in still air. Fishermen call it the old cow. It was silent for one week in 1931, when mice had eaten the leather of its bellows.

The first post boat to the rock was the Alma, a sailing boat of nine metres. It came every second Thursday, if the wind allowed it. In 1919 the motor boat Signe replaced the Alma, and since 1968 a helicopter has brought post, food and spare parts.

A garden of four metres by three lies on the southern side of the tower. Its earth was brought from the mainland in flour sacks by Maria Brandt, who grew potatoes, kale and red currants there. The currant bushes are said to be the same ones that she planted in 1895.

In the great storm of October 1967 a wave broke the windows of the lamp room, thirty-eight metres above the sea. The keepers hung blankets before the broken panes and turned the lens by hand for two nights, because the clockwork had filled with salt water.

The light was automated in 1978, and the last keeper, Johan Ekberg, left the rock on 14 June of that year. He took with him a barometer, a cat named Bo, and the brass bell that had hung beside the door. The bell now hangs in the school at Vessby and is rung on the first day of each school year.

Since 2003 the tower has belonged to a society of four hundred members, who repair it in summer. Visitors may climb the tower on Sundays in July and August. The boat leaves Vessby at ten in the morning and costs 24 crowns for adults and 12 crowns for children.
`;
